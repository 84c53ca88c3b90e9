"""Units of answers: which words and symbols are units, and how they convert into each other."""

import re
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit as a multiple of a base unit. Units of the same dimension convert; unknown words have only their name."""

    dimension: str
    factor: Fraction


def _units(dimension: str, factors: dict[str, str | int]) -> dict[str, Unit]:
    return {name: Unit(dimension, Fraction(factor)) for names, factor in factors.items() for name in names.split()}


_TABLE: dict[str, Unit] = {
    **_units(
        "length",
        {
            "nm nanometer nanometre": "1e-9",
            "um micrometer micrometre micron": "1e-6",
            "mm millimeter millimetre": "0.001",
            "cm centimeter centimetre 厘米": "0.01",
            "dm decimeter decimetre": "0.1",
            "m meter metre 米": 1,
            "km kilometer kilometre 千米 公里": 1000,
            "in inch inche": "0.0254",
            "ft foot feet": "0.3048",
            "yd yard": "0.9144",
            "mi mile": "1609.344",
        },
    ),
    **_units("mass", {"mg": "1e-6", "g gram 克": "0.001", "kg kilogram 千克 公斤": 1, "ton tonne t 吨": 1000}),
    **_units("weight", {"oz ounce": 1, "lb pound-weight": 16}),
    **_units(
        "time",
        {
            "ms millisecond": "0.001",
            "s sec second 秒": 1,
            "min minute 分钟": 60,
            "h hr hour 小时": 3600,
            "day 天": 86400,
            "week 周": 604800,
        },
    ),
    **_units("months", {"month 个月": 1, "year yr 年": 12}),
    **_units("volume", {"ml milliliter millilitre 毫升": "0.001", "l liter litre 升": 1}),
    **_units("dollars", {"cent ¢": "0.01", "dollar usd buck $": 1}),
    **_units("yuan", {"元 yuan rmb 块": 1, "角": "0.1"}),
    **_units("force", {"newton": 1}),
    **_units("energy", {"joule": 1, "kj kilojoule": 1000, "cal calorie": "4.184", "kcal kilocalorie": 4184}),
    **_units("energy", {"electronvolt": "1.602176634e-19"}),
    **_units("power", {"watt": 1, "kw kilowatt": 1000}),
    **_units("voltage", {"volt": 1}),
    **_units("frequency", {"hertz hz": 1, "khz kilohertz": 1000}),
    **_units("current", {"ampere amp": 1}),
    **_units("temperature", {"kelvin": 1}),
    **_units("pressure", {"pascal": 1}),
    **_units("charge", {"coulomb": 1}),
    **_units("resistance", {"ohm": 1}),
    **_units("amount", {"mole mol": 1}),
    **_units("degree", {"degree deg": 1}),
    **_units("radian", {"radian rad": 1}),
}
# Symbols of units that are variables elsewhere, so that they are no unit words, also with a prefix such as the `m` of
# `mA`. `mW` and `MW` differ.
_NAMES = {"N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere", "K": "kelvin", "Hz": "hertz"}
_NAMES |= {"Pa": "pascal", "C": "coulomb", "eV": "electronvolt", "mol": "mole", "ohm": "ohm"}
_FACTORS = {"": "1", "n": "1e-9", "u": "1e-6", "m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9"}
_SYMBOLS = {
    prefix + symbol: Unit(_TABLE[name].dimension, _TABLE[name].factor * Fraction(factor))
    for symbol, name in _NAMES.items()
    for prefix, factor in _FACTORS.items()
}
_PRODUCT = re.compile(r"[A-Za-z]+(?:\^\{?-?\d\}?)?(?:\s+[A-Za-z]+(?:\^\{?-?\d\}?)?)+")
_FACTOR = re.compile(r"([A-Za-z]+)(?:\^\{?(-?\d)\}?)?")
_SQUARE = re.compile(r"^(?:square|sq\.?)\s+(.+)$|^(.+)\s+squared$|^平方(.+)$")
_CUBE = re.compile(r"^(?:cubic|cu\.?)\s+(.+)$|^(.+)\s+cubed$|^立方(.+)$")
_EXPONENT = re.compile(r"\^\s*\{?\s*(-?\d)\s*\}?$")
_PREFIXES = re.compile(r"^(?:of|in|per)\s+")


def read_unit(text: str) -> Unit | None:
    """Return the unit that a text names; `None` if the text is empty or `units`. Every word that is not in the
    table is a unit with another dimension: "apples" is "apple"."""
    name = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    name = re.sub(r"\\mu\s*(?=[mgs])", "u", name)
    name = re.sub(r"\\[,;:! ]|\\cdot|[.~]", " ", name)
    name = re.sub(r"\s+", " ", name).strip(" ,;")
    name = _PREFIXES.sub("", name)
    if "/" in name or " per " in name:
        over, _, under = name.replace(" per ", "/").partition("/")
        top, bottom = read_unit(over), read_unit(under)
        if top and bottom:
            return Unit(f"{top.dimension}/{bottom.dimension}", top.factor / bottom.factor)
    if _PRODUCT.fullmatch(name) and (product := _read_product(name)) is not None:
        return product
    exponent = 1
    if match := _EXPONENT.search(name):
        exponent = int(match[1])
        name = name[: match.start()].strip()
    for pattern, power in ((_SQUARE, 2), (_CUBE, 3)):
        if match := pattern.match(name.lower()):
            name = next(group for group in match.groups() if group)
            exponent = power
    symbol = _SYMBOLS.get(name)
    name = _singular(name.replace("electron volt", "electronvolt"))
    if name in ("", "unit"):
        return None
    if name == "mph":
        return Unit("length/time", Fraction("1609.344") / 3600)
    if name in ("kmh", "kph"):
        return Unit("length/time", Fraction(1000, 3600))
    unit = symbol or _TABLE.get(name, Unit(name, Fraction(1)))
    if exponent == 1:
        return unit
    if unit.dimension == "length" and exponent == 3:
        return Unit("volume", unit.factor**3 * 1000)  # in liters
    return Unit(f"{unit.dimension}^{exponent}", unit.factor**exponent)


def _read_product(name: str) -> Unit | None:
    """Return the unit of `m s^{-2}`, a product of units of the table; `None` if a factor is none of them."""
    above, below = [], []
    factor = Fraction(1)
    for word, power in _FACTOR.findall(name):
        if word not in _SYMBOLS and not is_unit_word(word):
            return None
        unit = read_unit(f"{word}^{power.lstrip('-')}" if power.lstrip("-") not in ("", "1") else word)
        if unit is None:
            return None
        if power.startswith("-"):
            below.append(unit.dimension)
            factor /= unit.factor
        else:
            above.append(unit.dimension)
            factor *= unit.factor
    dimension = " ".join(sorted(above))
    return Unit("/".join([dimension, *sorted(below)]), factor)


def _singular(name: str) -> str:
    if len(name) > 2 or name in ("m", "g", "s", "h", "t", "l"):
        name = name.lower()
    if name in _TABLE or len(name) <= 2:
        return name if name in _TABLE else name.lower()
    for ending, replacement in (("ies", "y"), ("es", ""), ("s", "")):
        if name.endswith(ending) and name.removesuffix(ending) + replacement in _TABLE:
            return name.removesuffix(ending) + replacement
    return name.removesuffix("s") if not name.endswith("ss") else name


def is_unit_word(word: str) -> bool:
    """Whether a word or symbol is in the table of units."""
    return _singular(word) in _TABLE or word.lower().rstrip("s") in ("unit", "mph", "kmh", "kph")
