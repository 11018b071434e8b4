"""Training: loss, optimizer, step, checkpoint, recorder, and the loop that ties them together."""
