//! Functions that have little purpose but what they need of the translator: each must do as a circuit what it does here. This file is a part of
//! the tests, and a crate of its own for rustc.

/// What goes in.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct In {
    /// Numbers.
    pub a: u64,
    /// Numbers.
    pub b: u64,
    /// Numbers in a row.
    pub list: [u16; 4],
    /// A small one.
    pub c: u8,
}

/// What comes out.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Out {
    /// Numbers.
    pub x: u64,
    /// Numbers.
    pub y: u32,
    /// Numbers in a row.
    pub list: [u8; 3],
}

/// Each has a circuit.
pub mod good {
    use super::{In, Out};

    /// By what is not constant, and around.
    #[inline(never)]
    pub fn shifts(input: &In, output: &mut Out) {
        output.x = (input.a << (input.c & 63)) ^ (input.b >> (input.a & 63));
        output.y = ((input.a as i32) >> (input.c & 31)) as u32 ^ (input.b as u32).rotate_left(7);
        output.list = [input.c.rotate_right(3), (input.a as u8).reverse_bits(), (input.b.swap_bytes()) as u8];
    }

    /// With and without sign.
    #[inline(never)]
    pub fn orders(input: &In, output: &mut Out) {
        let (a, b) = (input.a as i32, input.b as i32);
        output.x = i64::from(a.max(b)).wrapping_sub(i64::from(a.min(b))) as u64;
        output.y = u32::from(a < b) | u32::from(a >= 0) << 1 | u32::from(input.a <= input.b) << 2 | u32::from(a > -5) << 3;
        output.list =
            [(input.c as i8).wrapping_abs() as u8, u8::from(input.list[0] < input.list[1]), u8::from(input.c > 200)];
    }

    /// Counting bits.
    #[inline(never)]
    pub fn counts(input: &In, output: &mut Out) {
        output.x = u64::from(input.a.count_ones()) << 32 | u64::from(input.b.leading_zeros());
        output.y = (input.a as u32).trailing_zeros();
        output.list =
            [input.list[0].trailing_zeros() as u8, u8::from(input.a.count_ones() > 1), input.c.leading_zeros() as u8];
    }

    /// Sums that end somewhere.
    #[inline(never)]
    pub fn sums(input: &In, output: &mut Out) {
        let (sum, over) = input.a.overflowing_add(input.b);
        let (difference, under) = (input.a as u32).overflowing_sub(input.b as u32);
        output.x = if over { input.a.saturating_sub(input.b) } else { sum.wrapping_mul(u64::from(input.c)) };
        output.y = if under { (input.a as u32).saturating_add(input.b as u32) } else { difference };
        output.list = [input.c.wrapping_neg(), input.c.wrapping_mul(5), input.c.abs_diff(input.a as u8)];
    }

    /// A loop of known length over an array, with ways out.
    #[inline(never)]
    pub fn walks(input: &In, output: &mut Out) {
        let (mut sum, mut found) = (0u64, 0xffu8);
        for (at, value) in input.list.iter().enumerate() {
            if u64::from(*value) == input.a & 0xffff {
                found = at as u8;
                break;
            }
            if *value & 1 == 1 {
                sum = sum.wrapping_add(u64::from(*value).wrapping_mul(input.b));
            }
        }
        output.x = sum;
        output.y = u32::from(found);
        output.list = [0; 3];
        if found < 3 {
            output.list[1] = input.c;
        }
    }

    /// Ways that end early, and write on their own.
    #[inline(never)]
    pub fn leaves(input: &In, output: &mut Out) {
        *output = Out { x: input.b, y: input.a as u32, list: [input.c; 3] };
        match input.c {
            0 => output.x = 1,
            1..=9 => {
                if input.a > input.b {
                    output.y = 7;
                    return;
                }
                output.list[2] = 9;
            }
            200..=255 => *output = Out::default(),
            _ => {}
        }
        output.x ^= u64::from(output.y);
    }
}

/// None has a circuit.
pub mod bad {
    use super::{In, Out};

    /// Nobody knows when it ends.
    #[inline(never)]
    pub fn unbounded(input: &In, output: &mut Out) {
        *output = Out::default();
        let mut a = input.a;
        while a > 3 {
            a = if a & 1 == 0 { a / 2 } else { a.wrapping_mul(3).wrapping_add(1) };
            output.y = output.y.wrapping_add(1);
        }
    }

    /// Divides.
    #[inline(never)]
    pub fn divides(input: &In, output: &mut Out) {
        *output = Out { x: input.a / (input.b | 1), ..Out::default() };
    }

    /// Reads what depends on what goes in.
    #[inline(never)]
    pub fn indexes(input: &In, output: &mut Out) {
        *output = Out { x: u64::from(input.list[usize::from(input.c & 3)]), ..Out::default() };
    }

    /// Can panic.
    #[inline(never)]
    pub fn panics(input: &In, output: &mut Out) {
        assert!(input.a > 3, "a small number");
        *output = Out::default();
    }

    /// Does not write everything.
    #[inline(never)]
    pub fn forgets(input: &In, output: &mut Out) {
        output.x = input.a;
    }
}
