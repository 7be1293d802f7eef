"""What one step of any module holds, moves and computes, without its weights or its data.

The module's own forward and backward run over fake tensors, under the engine's hooks, on lanes that
launch nothing. The result is a `TracedStep`, which `plan` takes in place of a model's shape.
Nothing is trained here. Start at `plan_model.plan_model`.
"""
