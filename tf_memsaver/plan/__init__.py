"""Plans, the simulator that judges them, and the planners that propose them. No TensorFlow here."""
