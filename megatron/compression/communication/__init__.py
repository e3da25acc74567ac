"""What travels between ranks: how it is counted, and how far off it is."""
