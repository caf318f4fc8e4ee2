"""The bundled trainer: recipes, schedules, snapshots and resumable runs."""
