"""Tests of `offloadtrain.sizing`."""
