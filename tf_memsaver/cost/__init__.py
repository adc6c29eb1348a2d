"""What an operation costs: bytes, floating-point operations, workspace and time. No TensorFlow here."""
