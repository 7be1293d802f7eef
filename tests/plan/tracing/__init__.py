"""Tests of `offloadtrain.plan.tracing`."""
