// Command goclients makes one call with a Go client library's default retries for
// each base path it is given, and prints a line of JSON on how each call ended:
//
//	goclients LIBRARY HOST PATIENCE_MS BASE…
//
// The libraries follow HTTPS_PROXY and SSL_CERT_FILE by themselves. It is a module of
// its own, so that the product depends on none of them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	dynamotypes "github.com/aws/aws-sdk-go-v2/service/dynamodb/types"
	"github.com/aws/aws-sdk-go-v2/service/lambda"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/google/go-github/v74/github"
	"github.com/hashicorp/go-retryablehttp"
	"github.com/openai/openai-go/v3"
	openaioption "github.com/openai/openai-go/v3/option"
	"github.com/slack-go/slack"
	"github.com/stripe/stripe-go/v82"
	"google.golang.org/genai"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

const dummy = "dummy"

// credentials are no secret, and replaced on the way.
func credentials() aws.CredentialsProvider {
	return aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
		return aws.Credentials{AccessKeyID: "AKIADUMMY", SecretAccessKey: dummy}, nil
	})
}

const region = "us-east-1"

var calls = map[string]func(ctx context.Context, at string) error{
	"openai": func(ctx context.Context, at string) error {
		c := openai.NewClient(openaioption.WithAPIKey(dummy), openaioption.WithBaseURL(at))
		_, err := c.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("x")}})
		return err
	},
	"anthropic": func(ctx context.Context, at string) error {
		c := anthropic.NewClient(anthropicoption.WithAPIKey(dummy), anthropicoption.WithBaseURL(at))
		_, err := c.Messages.New(ctx, anthropic.MessageNewParams{Model: "m", MaxTokens: 1, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("x"))}})
		return err
	},
	"openaistream": func(ctx context.Context, at string) error {
		c := openai.NewClient(openaioption.WithAPIKey(dummy), openaioption.WithBaseURL(at))
		s := c.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("x")}})
		for s.Next() {
		}
		return s.Err()
	},
	"anthropicstream": func(ctx context.Context, at string) error {
		c := anthropic.NewClient(anthropicoption.WithAPIKey(dummy), anthropicoption.WithBaseURL(at))
		s := c.Messages.NewStreaming(ctx, anthropic.MessageNewParams{Model: "m", MaxTokens: 1, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("x"))}})
		for s.Next() {
		}
		return s.Err()
	},
	"stripe": func(ctx context.Context, at string) error {
		// It knows errors by a path that begins with /v1: the base is further behind.
		u, err := url.Parse(at)
		if err != nil {
			return err
		}
		backends := stripe.NewBackendsWithConfig(&stripe.BackendConfig{URL: stripe.String("https://" + u.Host), LeveledLogger: &stripe.LeveledLogger{}})
		c := stripe.NewClient("sk_test_dummy", stripe.WithBackends(backends))
		_, err = c.V1Charges.Update(ctx, u.Path[1:], &stripe.ChargeUpdateParams{Description: stripe.String("x")})
		return err
	},
	"github": func(ctx context.Context, at string) error {
		c := github.NewClient(nil).WithAuthToken(dummy)
		base, err := url.Parse(at + "/")
		if err != nil {
			return err
		}
		c.BaseURL = base
		_, _, err = c.Issues.Create(ctx, "o", "r", &github.IssueRequest{Title: github.Ptr("t")})
		return err
	},
	"slack": func(ctx context.Context, at string) error {
		_, _, err := slack.New("xoxb-dummy", slack.OptionAPIURL(at+"/api/")).PostMessageContext(ctx, "C", slack.MsgOptionText("x", false))
		return err
	},
	"google": func(ctx context.Context, at string) error {
		c, err := genai.NewClient(ctx, &genai.ClientConfig{APIKey: dummy, Backend: genai.BackendGeminiAPI, HTTPOptions: genai.HTTPOptions{BaseURL: at}})
		if err != nil {
			return err
		}
		_, err = c.Models.GenerateContent(ctx, "m", genai.Text("x"), nil)
		return err
	},
	"kubernetes": func(ctx context.Context, at string) error {
		c, err := rest.RESTClientFor(&rest.Config{Host: at, BearerToken: dummy, APIPath: "/api",
			ContentConfig: rest.ContentConfig{GroupVersion: &schema.GroupVersion{Version: "v1"}, NegotiatedSerializer: scheme.Codecs.WithoutConversion()}})
		if err != nil {
			return err
		}
		return c.Post().Namespace("n").Resource("configmaps").Body([]byte(`{"metadata":{"generateName":"x-"}}`)).Do(ctx).Error()
	},
	"dynamodb": func(ctx context.Context, at string) error {
		c := dynamodb.New(dynamodb.Options{Region: region, BaseEndpoint: &at, Credentials: credentials()})
		_, err := c.PutItem(ctx, &dynamodb.PutItemInput{TableName: aws.String("t"), Item: map[string]dynamotypes.AttributeValue{"id": &dynamotypes.AttributeValueMemberS{Value: "1"}}})
		return err
	},
	"sts": func(ctx context.Context, at string) error {
		_, err := sts.New(sts.Options{Region: region, BaseEndpoint: &at, Credentials: credentials()}).GetSessionToken(ctx, &sts.GetSessionTokenInput{})
		return err
	},
	"s3": func(ctx context.Context, at string) error {
		c := s3.New(s3.Options{Region: region, BaseEndpoint: &at, Credentials: credentials(), UsePathStyle: true})
		_, err := c.PutObject(ctx, &s3.PutObjectInput{Bucket: aws.String("b"), Key: aws.String("k"), Body: strings.NewReader("x")})
		return err
	},
	"lambda": func(ctx context.Context, at string) error {
		c := lambda.New(lambda.Options{Region: region, BaseEndpoint: &at, Credentials: credentials()})
		_, err := c.Invoke(ctx, &lambda.InvokeInput{FunctionName: aws.String("f"), Payload: []byte("{}")})
		return err
	},
	"retryablehttp": func(ctx context.Context, at string) error {
		c := retryablehttp.NewClient()
		c.Logger = nil
		c.ErrorHandler = retryablehttp.PassthroughErrorHandler
		req, err := retryablehttp.NewRequestWithContext(ctx, http.MethodPost, at, []byte("x=1"))
		if err != nil {
			return err
		}
		resp, err := c.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		text := make([]byte, 4096)
		n, _ := resp.Body.Read(text)
		return fmt.Errorf("%s: %s", resp.Status, text[:n])
	},
}

// ended is what is printed of one call.
type ended struct {
	Base    string `json:"base"`
	End     string `json:"end"` // done, failed, late
	Message string `json:"message"`
}

// shown is what a library shows of an error.
func shown(err error) string {
	text := err.Error()
	var openaiErr *openai.Error
	if errors.As(err, &openaiErr) {
		text += " | " + openaiErr.Message // its Error() has the status only
	}
	var stripeErr *stripe.Error
	if errors.As(err, &stripeErr) {
		text += " | " + stripeErr.Msg
	}
	var slackErr slack.SlackErrorResponse
	if errors.As(err, &slackErr) {
		text += " | " + strings.Join(slackErr.ResponseMetadata.Messages, " ")
	}
	return text
}

func run(args []string) error {
	if len(args) < 4 {
		return errors.New("usage: goclients LIBRARY HOST PATIENCE_MS BASE…")
	}
	call, ok := calls[args[0]]
	patience, err := strconv.Atoi(args[2])
	if !ok || err != nil {
		return fmt.Errorf("goclients: %q: no such library, or %q: no number", args[0], args[2])
	}
	out := json.NewEncoder(os.Stdout)
	for _, base := range args[3:] {
		e := ended{Base: base, End: "done"}
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(patience)*time.Millisecond)
		if err := call(ctx, "https://"+args[1]+base); err != nil {
			e.End, e.Message = "failed", shown(err)
			if ctx.Err() != nil {
				e.End = "late"
			}
		}
		cancel()
		if err := out.Encode(e); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
