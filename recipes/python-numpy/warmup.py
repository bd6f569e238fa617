"""Import what the children will use, and use it once.

Much of Python and numpy is loaded on first use: codecs, linear algebra, the printing of
arrays, the random generator.  What happens here happens once, in the parent; every child
shares the pages.  The names stay in the namespace that children evaluate in.
"""

import json
import math
import random
import ssl
import uuid

import numpy
import numpy as np

_matrix = np.arange(16, dtype=float).reshape(4, 4) + 4 * np.eye(4)

repr(_matrix)
str(np.linalg.solve(_matrix, np.ones(4)))
json.loads(json.dumps(np.zeros(5).tolist()))
np.fft.rfft(np.sort(np.random.default_rng(0).normal(size=64)))
np.random.random(4)
random.random()
uuid.uuid4()
math.sqrt(2.0)
ssl.create_default_context()

del _matrix
