"""Import the libraries and use each one once, as a child will.

Much of them is loaded on first use: readers of files, solvers, fonts, formats of numbers.  What
happens here happens once, in the parent; every child shares the pages.  The names stay in the
namespace that children evaluate in.
"""

import io
import json
import math
import random

import matplotlib as mpl
import numpy as np
import pandas as pd
import scipy
import sklearn
from matplotlib import pyplot as plt
from scipy import optimize, stats
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler


def _use_everything():
    numbers = np.random.default_rng(0).normal(size=(60, 2))
    table = pd.read_csv(io.StringIO("day,town,sold\n2026-01-01,a,3\n2026-01-02,b,5\n"))
    table["day"] = pd.to_datetime(table["day"])
    repr(table.merge(table.groupby("town", as_index=False)["sold"].sum(), on="town").describe())
    table.to_json()
    stats.ttest_ind(numbers[:, 0], numbers[:, 1])
    optimize.minimize(lambda x: ((x - 1) ** 2).sum(), np.zeros(2))
    labels = (numbers[:, 0] > 0).astype(int)
    train, test, train_labels, _ = train_test_split(StandardScaler().fit_transform(numbers), labels)
    for model in (LogisticRegression(), RandomForestClassifier(5), LinearRegression()):
        model.fit(train, train_labels).predict(test)
    figure, axes = plt.subplots()
    axes.plot(numbers[:, 0])
    axes.set_title("warm")
    figure.savefig(io.BytesIO(), format="png")
    plt.close(figure)
    json.dumps(math.sqrt(random.random()))


_use_everything()
