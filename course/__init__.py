"""The course: exercises, checks and grading. Skip it to read the engine; nothing imports it."""
