"""From a trained policy to a robot: export, card, runtime, safety, verification.

`card`, `runtime`, `safety` and `mock` need numpy and onnxruntime only, because they run on the
robot's computer; `export` and `verify` belong to the machine that trained.
"""
