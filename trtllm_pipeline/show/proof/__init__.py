"""`pipeline doctor --deep`: verify this package's knowledge of an installed toolchain on this machine.

    material            models, questions and a matrix, as files
    budget              the cells that fit in the time limit
    flow.bring_up_to_date                  runs the matrix like `pipeline run`
    reference_answers   the servers' answers compared with the float reference
    installed           installed options and placeholders compared with the tables
    findings            the results as a table, a file and sentences

`examination.examine` runs these in order.
"""
