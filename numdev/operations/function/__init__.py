"""A PyTorch function as an operation, with a reference as its own truth.

`trees` names what goes in and comes out, `function_runs` runs functions as PyTorch
does, `reference` runs the reference exactly and rounded (`float32_error_model` adds
what sums in float32 err), `yardstick` says what may be erred, `inputs` makes arguments,
`causes` names what a function computes instead. Numbers become rows and verdicts in
`numdev.studies.audit.functions`."""
