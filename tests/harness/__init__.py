"""What the tests and benchmarks of every chapter stand on.

layout       where things are: chapters, scripts, tests and benchmarks
programs     run a script as `python` would, without importing torch again
ranks        run a function on N processes, each with its rank in a Gloo group, and learn exactly what failed in which
spawn        start the ranks of a benchmark: processes of their own, with Gloo or NCCL
reference    decide whether a parallel run equals the unsharded one: losses, every gradient, weights after three steps
meter        count bytes: held per rank, saved for backward, at the peak, and sent by each collective
report       time two things in pairs, write results/*.json from a clean tree, fill the tables of the READMEs from them
computed     the tables of the READMEs that are formulas filled in, and need no measurement
figures      draw the figures of the READMEs from results/, and know when one is older than its numbers or its code
fences       find the exercises in a script, take their bodies out, put other bodies in
mutations    planted mistakes, and a cache that remembers which were caught
module_cache unload the modules of this repository, for processes that stay

The harness has tests of its own (tests/test_ranks.py, test_reference.py, test_meter.py, test_report.py,
test_mutations.py), and mistakes planted in it: a checker that cannot fail proves nothing, so each of its verdicts is
provoked there.
"""
