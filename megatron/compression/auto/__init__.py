"""``--compression auto``: time the run's own messages, choose what gains within a budget of loss, check it."""
