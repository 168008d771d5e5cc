"""Builds the optional extension that launches kernels; everything works without it, a call is some microseconds slower."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("tensorplay._native", ["tensorplay/_native.c"], optional=True)])
