"""Builds the optional extension that serves calls and launches kernels; everything works without it, a call is some
microseconds slower."""

from glob import glob

from setuptools import Extension, setup

sources = Extension("tensorplay._native", ["tensorplay/csrc/native.c"], depends=glob("tensorplay/csrc/*.h"), optional=True)
setup(ext_modules=[sources])
