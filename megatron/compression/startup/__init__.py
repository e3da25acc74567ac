"""What is checked and chosen between the command line and the first iteration."""
