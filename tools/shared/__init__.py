"""What tools and tests share: nets and models to try things on, training them, comparing bits, and results."""
