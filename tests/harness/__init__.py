"""Tools for the tests and benchmarks of every chapter.

layout       where things are: chapters, scripts, tests and benchmarks
programs     run a script as `python` would, without importing torch again
ranks        run a function on N processes, each a rank of a Gloo group, and report what failed on which
spawn        start the ranks of a benchmark: processes of their own, with Gloo or NCCL
reference    decide whether a parallel run equals the unsharded one: losses, every gradient, weights after three steps
attention    the reference of attention in parts: inputs, results and gradients, the definition
late         collectives whose results are NaN until they are waited for
meter        count bytes: held per rank, saved for backward, at the peak, and sent by each collective
ceilings     the rates that this device reaches, and two things timed in pairs
goals        the chapters' goals on one H100 or H200, and whether a run reached them
predictions  the expected time of a kernel, from bytes, operations and its binary
report       time two things in pairs, write results/ from a clean tree, fill the tables of the READMEs from them
computed     the tables of the READMEs that are computed from formulas, without a measurement
figures      draw the figures of the READMEs from results/, and find those older than their numbers or code
fences       find the exercises in a script, take their bodies out, put other bodies in
mutations    planted mistakes, and a cache of which were caught
module_cache unload the modules of this repository, for persistent processes
warm_python  a Python that has imported torch already, and forks for each script

The harness has tests of its own (tests/test_ranks.py, test_reference.py, test_meter.py, test_report.py,
test_mutations.py), and mistakes planted in it: a checker that cannot fail proves nothing, so these tests
provoke each of its verdicts.
"""
