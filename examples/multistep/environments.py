"""CartPole and Pendulum with the rules of gymnasium's CartPole-v1 and Pendulum-v1, for machines
without gymnasium. With gymnasium installed, write `environment = "CartPole-v1"` instead."""

import math
import random


class CartPole:
    """A pole on a cart, which the actions 0 and 1 push to the left and to the right. Every step is
    worth 1 until the pole falls, at most 500."""

    def __init__(self, gravity=9.8):
        self.gravity = gravity
        self.random = random.Random()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = random.Random(seed)
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        self.steps = 0
        return self.state, {}

    def step(self, action):
        x, speed, angle, turning = self.state
        force = 10.0 if action == 1 else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * turning * turning * sine) / 1.1
        angular = (self.gravity * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1))
        linear = push - 0.05 * angular * cosine / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * linear, angle + 0.02 * turning, turning + 0.02 * angular]
        self.steps += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * 2 * math.pi / 360
        return self.state, 1.0, fallen, self.steps >= 500 and not fallen, {}


class Pendulum:
    """A pendulum that a torque between -2 and 2 swings up. A step costs more the further it is from
    upright; an episode has 200 steps."""

    def reset(self, *, seed=None, options=None):
        generator = random.Random(seed)
        self.angle, self.turning = generator.uniform(-math.pi, math.pi), generator.uniform(-1.0, 1.0)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        torque = min(2.0, max(-2.0, float(action[0])))
        off = (self.angle + math.pi) % (2 * math.pi) - math.pi
        cost = off * off + 0.1 * self.turning * self.turning + 0.001 * torque * torque
        self.turning = min(8.0, max(-8.0, self.turning + (15.0 * math.sin(self.angle) + 3.0 * torque) * 0.05))
        self.angle += self.turning * 0.05
        self.steps += 1
        return self._observation(), -cost, False, self.steps >= 200, {}

    def _observation(self):
        return [math.cos(self.angle), math.sin(self.angle), self.turning]
