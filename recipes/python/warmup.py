"""Import what most programs of Python use, so that each child has it from its first instruction."""

import collections
import itertools
import json
import math
import random
import re
import time

json.loads(json.dumps({"warm": [1, 2.5, None]}))
re.compile(r"\w+").findall("compiled once")
random.random()
