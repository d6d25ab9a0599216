"""What the tests and benchmarks of every chapter stand on.

house    where things are: chapters, their two floors, scripts, tests and benchmarks
programs run a script as `python` would, without importing torch again
ranks    run a function on N processes, each with its rank in a gloo group, and learn exactly what went wrong in which
oracle   decide whether a parallel run equals the unsharded one: losses, every gradient, weights after three SGD steps
meter    count bytes: held per rank, saved for backward, at the peak, and sent by each collective
report   time two things in pairs, write results/*.json from a clean tree, fill the tables of the READMEs from them
figures  draw the figures of the READMEs from results/, and know when one is older than its numbers or its code
fences   find the exercises in a script, take their bodies out, put other bodies in
plant    planted mistakes, and a cache that remembers which were caught
forget   unload the modules of this repository, for processes that stay

The harness has tests of its own (tests/test_ranks.py, test_oracle.py, test_meter.py, test_report.py, test_plant.py),
and mistakes planted in it: a checker that cannot fail proves nothing, so each of its verdicts is provoked there.
"""
