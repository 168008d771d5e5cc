"""Rows follow."""
