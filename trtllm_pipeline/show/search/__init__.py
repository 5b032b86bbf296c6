"""Search: the best cell of a large matrix without measuring all of it. `choice.decide` is pure; `driver.search` obeys it."""
