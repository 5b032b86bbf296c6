"""Search for the best cell of a large matrix without measuring every cell. `next_cell.decide` is pure. `driver.search` runs it."""
