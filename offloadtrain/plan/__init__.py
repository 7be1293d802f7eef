"""What a job needs and how long a step takes, before anything is allocated. Standard library
only."""
