"""What is right and what is wrong with this machine for training, and how fast it is."""
