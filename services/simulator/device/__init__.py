"""The simulated worker: its queue of steps (`device`), step times (`clock`), the model of a GPU (`roofline`)."""
