"""The engine: requests, slots, the scheduler, and the steps that a device runs."""
