"""Model families: what a checkpoint means, and how it runs."""
