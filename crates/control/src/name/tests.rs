use proptest::prelude::*;

use super::*;

#[test]
fn names_are_safe_in_paths_and_urls() {
    let (longest, longer) = ("A".repeat(64), "A".repeat(65));
    for good in ["a", "0", "disk0", "web-1.root_2", &longest] {
        assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
    }
    for bad in ["", ".", "..", "-a", "_a", "a/b", "a b", "ä", "a\n", "a\0", &longer] {
        assert_eq!(bad.parse::<Name>(), Err(NameError(bad.to_owned())));
        let json = serde_json::to_string(bad).unwrap();
        assert!(serde_json::from_str::<Name>(&json).is_err(), "{bad:?}");
    }
}

proptest! {
    #[test]
    fn what_the_pattern_allows_is_a_name(text in "[A-Za-z0-9][A-Za-z0-9._-]{0,63}") {
        let name: Name = text.parse().unwrap();
        prop_assert_eq!(name.as_str(), text);
    }

    #[test]
    fn a_name_is_never_a_path(text in "\\PC{0,70}") {
        if let Ok(name) = text.parse::<Name>() {
            let mut parts = std::path::Path::new(name.as_str()).components();
            prop_assert!(matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none());
        }
    }
}
