"""The budget of a language model: tokens, money, seconds of waiting."""

import math
from dataclasses import dataclass

from cuda_l2.llm.settings import ModelSettings


@dataclass
class Budget:
    """The amounts spent, and whether the budget pays for one more question at its highest cost."""

    settings: ModelSettings
    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0  # stays 0 without prices

    @property
    def priced(self) -> bool:
        return self.settings.price_in is not None

    def cost(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Cost in the unit of the prices; NaN without prices."""
        price_in, price_out = self.settings.price_in, self.settings.price_out
        if price_in is None or price_out is None:
            return math.nan
        return (prompt_tokens * price_in + answer_tokens * price_out) * 1e-6

    def refusal(self, prompt_tokens: int, answer_tokens: int) -> str:
        """Why the budget does not pay for this many tokens more, in one line; empty where it does."""
        tokens, money, seconds = self.settings.tokens, self.settings.money, self.settings.model_seconds
        if tokens is not None and self.tokens + prompt_tokens + answer_tokens > tokens:
            left = f"spent but for {tokens - self.tokens}" if self.tokens else "too small"
            return f"the budget of {tokens} tokens is {left}"
        if money is not None and self.money + self.cost(prompt_tokens, answer_tokens) > money:
            left = f"spent but for {money - self.money:.4g}" if self.money else "too small"
            return f"the budget of {money:g} is {left}"
        if seconds is not None and self.seconds >= seconds:
            return f"the budget of {seconds:g} s of waiting for the model is spent"
        return ""

    def spend(self, prompt_tokens: int, answer_tokens: int) -> None:
        self.tokens += prompt_tokens + answer_tokens
        if self.priced:
            self.money += self.cost(prompt_tokens, answer_tokens)
