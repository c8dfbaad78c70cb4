"""The checks. Each file: PROPERTIES, cases(rng), judge(case, answer); the truth stays in here."""
