#!/usr/bin/env python3
"""Preference losses of one pair in double, from the papers' formulas: what test_ops compares with.

Sums of log p of the policy -10 and -12, of the reference -11 and -11.5, over 5 and 8 tokens.
Usage: dev/golden/make_preferences.py
"""
from math import exp, log

policy, reference, tokens = (-10, -12), (-11, -11.5), (5, 8)
rho = [p - r for p, r in zip(policy, reference)]
mean = [p / n for p, n in zip(policy, tokens)]
ratio = [r / n for r, n in zip(rho, tokens)]
odds = [m - log(1 - exp(m)) for m in mean]


def logistic(x):
    """-log sigmoid(x)"""
    return log(1 + exp(-x))


u = 0.1 * (rho[0] - rho[1])
print("dpo   ", logistic(u))
print("cdpo  ", 0.9 * logistic(u) + 0.1 * logistic(-u))
print("ipo   ", (ratio[0] - ratio[1] - 1 / 0.2) ** 2)
print("simpo ", logistic(2 * (mean[0] - mean[1]) - 0.5))
print("orpo  ", -mean[0] + logistic(odds[0] - odds[1]))


def sigmoid(x):
    return 1 / (1 + exp(-x))


# KTO of a desirable and an undesirable answer, the second of weight 0.5; the reference point is 0.25.
print("kto   ", 1 - sigmoid(0.1 * (rho[0] - 0.25)) + 0.5 * (1 - sigmoid(0.1 * (0.25 - rho[1]))))
