"""The regularization thesis: its rules on XOR, XORD, MNIST, synthetic data and CIFAR-10, and the
power method.
"""
