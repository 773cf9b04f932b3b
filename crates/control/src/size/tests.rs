use proptest::prelude::*;

use super::*;

#[test]
fn what_people_write() {
    let sizes = [
        ("4096", 4096),
        ("0", 0),
        ("64K", 64 << 10),
        ("64k", 64 << 10),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        (" 1G ", 1 << 30),
        ("1.5G", 3 << 29),
        ("0.5K", 512),
        ("2T", 2 << 40),
        ("100B", 100),
        ("15.5E", 31 << 59),
    ];
    for (text, bytes) in sizes {
        assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
    }
}

#[test]
fn what_is_no_size_is_named() {
    for text in ["", "G", "-1", "1X", "1..5G", ".5G", "1.G", "1GiBs", "0x10", "1 2", "1e9", "⅓G", "1G1"] {
        assert!(matches!(text.parse::<Size>(), Err(SizeError::Syntax(named)) if named == text), "{text}");
    }
    assert_eq!("1GB".parse::<Size>(), Err(SizeError::Decimal("1GB".to_owned(), 'G')));
    assert_eq!("0.3K".parse::<Size>(), Err(SizeError::Fraction("0.3K".to_owned())));
    assert_eq!("1.5".parse::<Size>(), Err(SizeError::Fraction("1.5".to_owned())));
    assert_eq!("16E".parse::<Size>(), Err(SizeError::TooLarge("16E".to_owned())));
    assert!("16E".parse::<Size>().unwrap_err().to_string().starts_with("\"16E\" is 16 EiB or more"));
    assert_eq!("18446744073709551616".parse::<Size>(), Err(SizeError::TooLarge("18446744073709551616".to_owned())));
}

#[test]
fn json_takes_numbers_and_text() {
    assert_eq!(serde_json::from_str::<Size>("4096").unwrap(), Size(4096));
    assert_eq!(serde_json::from_str::<Size>("\"1G\"").unwrap(), Size(1 << 30));
    assert_eq!(serde_json::to_string(&Size(1 << 30)).unwrap(), "1073741824");
    let error = serde_json::from_str::<Size>("\"1Q\"").unwrap_err().to_string();
    assert!(error.contains("\"1Q\" is not a size"), "{error}");
    assert!(serde_json::from_str::<Size>("-1").unwrap_err().to_string().contains("negative"));
    assert!(serde_json::from_str::<Size>("[]").is_err());
}

#[test]
fn people_get_one_decimal() {
    let texts = [(0, "0"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), ((1 << 30) - 1, "1023.9M"), (u64::MAX, "15.9E")];
    for (bytes, text) in texts {
        assert_eq!(Size(bytes).approximate(), text);
    }
}

proptest! {
    #[test]
    fn printed_sizes_parse_to_themselves(bytes: u64, shift in 0_u32..64) {
        for size in [Size(bytes), Size(bytes << shift)] {
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }
    }

    #[test]
    fn any_text_is_a_size_or_an_error_that_quotes_it(text in ".{0,12}") {
        if let Err(error) = text.parse::<Size>() {
            let (whole, trimmed) = (format!("{text:?}"), format!("{:?}", text.trim()));
            let error = error.to_string();
            prop_assert!(error.contains(&whole) || error.contains(&trimmed));
        }
    }

    #[test]
    fn units_multiply(number in 0_u64..1024, unit in 0_usize..6) {
        let (letter, shift) = UNITS[unit];
        let (short, long) = (format!("{number}{letter}"), format!("{number}{letter}iB"));
        if let Some(bytes) = number.checked_mul(1 << shift) {
            prop_assert_eq!(short.parse(), Ok(Size(bytes)));
            prop_assert_eq!(long.parse(), Ok(Size(bytes)));
        } else {
            prop_assert!(short.parse::<Size>().is_err());
        }
    }
}
