"""What the tests and benchmarks of every chapter stand on.

ranks    run a function on N processes, each with its rank in a gloo group, and learn exactly what went wrong in which
oracle   decide whether a parallel run equals the unsharded one: losses, every gradient, weights after three SGD steps
meter    count bytes: held per rank, saved for backward, at the peak, and sent by each collective
report   time two things in pairs, write results/*.json, fill the tables of the READMEs from them
figures  draw the figures of the READMEs from results/, and know when one is older than its numbers
plant    apply a mistake to a copy of the repository and see whether the test that should catch it does

The harness has tests of its own (tests/test_ranks.py, test_oracle.py, test_meter.py, test_report.py): a checker that
cannot fail proves nothing, so each of its verdicts is provoked there.
"""
