"""What a step is made of, and what happens in it: the spec and the program, standard library only.

Here live the sizes and places of everything that moves (`spec`, `memory`), the scheduler that turns
events into operations (`program` and its parts), what predicts it (`simulate`) and what proves it
(`prove`). What knows a tensor, a stream or a model does not live here: the engine interprets the
program, the plan gives it costs. Start with `spec.StepSpec`, then `program.Program`.
"""
