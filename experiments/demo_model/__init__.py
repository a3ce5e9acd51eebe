"""The model in the box: data, training, evaluation and packaging of the byte-level demo model."""
