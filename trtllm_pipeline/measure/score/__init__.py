"""Accuracy: scores with intervals, drift between two models' answers, standard tasks."""
