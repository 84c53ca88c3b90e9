"""What leaves the machine: uploads, model cards, trackers."""
