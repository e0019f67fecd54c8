// Arithmetic that every device rounds the same way: integers, and products of significands in [1, 2).

const INFINITY: u32 = 0x7f800000u;
const LARGEST: u32 = 0x7f7fffffu;
const MAGNITUDE: u32 = 0x7fffffffu;
const FRACTION: u32 = 0x007fffffu;
const ONE: u32 = 0x3f800000u;
// Exponent field of infinities and NaNs.
const NOT_FINITE: u32 = 255u;

// The factor in [1, 2) of a normal number.
fn significand(bits: u32) -> f32 {
    return bitcast<f32>((bits & FRACTION) | ONE);
}

// Bits of a * b, each 0, a positive normal number or infinity: 0 below 2^-125, and infinite only if one of them is.
// Exponents are added as integers, so that nothing on the way is subnormal or overflows.
fn product(a: u32, b: u32) -> u32 {
    if a == INFINITY || b == INFINITY {
        return INFINITY;
    }
    if a == 0u || b == 0u {
        return 0u;
    }
    let factor = bitcast<u32>(significand(a) * significand(b));
    // The exponent field of the product plus 254.
    let field = (a >> 23u) + (b >> 23u) + (factor >> 23u);
    if field < 254u + 2u {
        return 0u;
    }
    if field >= 254u + NOT_FINITE {
        return LARGEST;
    }
    return ((field - 254u) << 23u) | (factor & FRACTION);
}
