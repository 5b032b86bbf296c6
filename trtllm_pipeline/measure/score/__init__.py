"""How right answers are: scores with intervals, drift between two models' answers, standard tasks."""
