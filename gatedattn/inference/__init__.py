"""What people do with a trained model's next-token distribution."""
