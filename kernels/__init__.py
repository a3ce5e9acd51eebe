"""Recurrences at the heart of the models: one folder an operation.

Each folder has `api.py` (one signature), `reference.py` (a float32 `lax.scan` to read beside the paper)
and the implementations that the api chooses from.
"""
