"""``--compression auto``: time the run's messages, choose what gains within a budget of loss, check
it."""
