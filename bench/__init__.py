"""Measurements: each script prints one table, peers side by side; results/ keeps what was measured."""
