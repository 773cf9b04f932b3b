//! A stack in a document (TOML, JSON): the expression as text, or tables.
//!
//! ```text
//!   stack = "stripe(chunk=64K, file:/a, file:/b)"
//!   stack = { service = "stripe", chunk = "64K", over = ["file:/a", { leaf = "file:/b", size = "1G" }] }
//! ```

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer, value::SeqAccessDeserializer},
};

use super::{Leaf, Node, ServiceNode};
use crate::settings::Settings;

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let node = deserializer.deserialize_any(Form)?;
        node.check().map_err(D::Error::custom)?;
        Ok(node)
    }
}

/// A node that is checked with all of the stack, not by itself.
struct Unchecked(Node);

impl<'de> Deserialize<'de> for Unchecked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Form).map(Self)
    }
}

struct Form;

impl<'de> Visitor<'de> for Form {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a stack: an expression, or a table with \"service\" and \"over\", or with \"leaf\"")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Node, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let (mut service, mut leaf, mut over) = (None, None, None);
        let mut settings = Settings::default();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "service" => service = Some(map.next_value::<String>()?),
                "leaf" => leaf = Some(map.next_value::<String>()?),
                "over" => over = Some(map.next_value::<Legs>()?.0),
                _ => {
                    let value = map.next_value::<Scalar>()?.0;
                    settings.add(&key, &value);
                }
            }
        }
        match (service, leaf, over) {
            (Some(service), None, over) => {
                Ok(Node::Service(ServiceNode { service, settings, legs: over.unwrap_or_default() }))
            }
            (None, Some(spec), None) => Ok(Node::Leaf(Leaf { spec, settings })),
            _ => Err(A::Error::custom("a node has \"service\" and \"over\", or \"leaf\"")),
        }
    }
}

/// One node, or a list of them.
struct Legs(Vec<Node>);

impl<'de> Deserialize<'de> for Legs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Vec<Node>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a node, or a list of nodes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Vec<Node>, E> {
                Form.visit_str(text).map(|node| vec![node])
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<Node>, A::Error> {
                Unchecked::deserialize(MapAccessDeserializer::new(map)).map(|node| vec![node.0])
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<Node>, A::Error> {
                let nodes = Vec::<Unchecked>::deserialize(SeqAccessDeserializer::new(seq))?;
                Ok(nodes.into_iter().map(|node| node.0).collect())
            }
        }
        deserializer.deserialize_any(One).map(Self)
    }
}

/// A setting's value as text.
struct Scalar(String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = String;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text, a number, true or false")
            }

            fn visit_str<E>(self, text: &str) -> Result<String, E> {
                Ok(text.to_owned())
            }

            fn visit_i64<E>(self, number: i64) -> Result<String, E> {
                Ok(number.to_string())
            }

            fn visit_u64<E>(self, number: u64) -> Result<String, E> {
                Ok(number.to_string())
            }

            fn visit_bool<E>(self, value: bool) -> Result<String, E> {
                Ok(value.to_string())
            }
        }
        deserializer.deserialize_any(Any).map(Self)
    }
}
