"""The programs of the engine, recorded once: what a rewritten scheduler is held equal to.

`canonical` says what of a program counts, `cases` which runs there are, `runs`, `scripts` and
`stages` what they do, `programs` keeps what was recorded. `python -m tests.oracle.record` records
anew. A change that only renames operations or buffers records nothing: `renamed` maps the new names
to the recorded ones. Every program is proved before it is recorded or compared.

What changed since the first recording, of the engine that kept events by hand:
* after gradients were dropped (zero_grad, a backward that failed) the next copy down waits for the
  norm of the dropped gradient, which it could overtake before (12 cases);
* step() waits for the last norm only, and not for updates that were launched behind it inside
  backward (modes early and speculative): what it launches knows less of the host lane.
* block inputs on the host are part of the program: the same launches in the same order, called
  "offload input", "fetch input" and "host block input" (146 cases, in which nothing else differs).
* the operation "show" is called "publish", and what it writes "weights snapshot".
* in ZeRO stage 3 the large blocks outside of layers are streamed, too (52 cases).
"""
