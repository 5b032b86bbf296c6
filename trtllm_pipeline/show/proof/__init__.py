"""`pipeline doctor --deep`: whether what is known of an installed toolchain is true on this machine.

    material       models, questions and a matrix, as files
    budget         what there is time for
    flow.bring_up_to_date                  the matrix, as `pipeline run` does it
    answers        what the servers said, against the float reference
    installed      options and placeholders of what is installed, against the tables
    findings       all of it as a table, a file and sentences

`examination.examine` does these in order.
"""
