"""Tasks that are drawn at random: recall, copying, lookup and state tracking."""
