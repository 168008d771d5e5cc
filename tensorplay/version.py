"""The version of the package: part of every artifact's key."""

VERSION = "0.1.0"
